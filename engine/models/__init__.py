"""Defines the classes of models, one for each kind of model that is computed in a different way. registry.py maps the description
of a family of models to its class."""
