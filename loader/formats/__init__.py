"""Defines the weight formats: the ways in which the matrices of a model's layers can be held in memory. Each format, or each family
of similar formats, has a file; `registry` lists them.
"""
