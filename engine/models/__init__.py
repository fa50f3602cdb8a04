"""Defines the models: one class for each kind of model that computes differently. registry.py maps the description of a family of
models to its class.
"""
