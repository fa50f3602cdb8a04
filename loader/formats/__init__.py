"""Defines the weight formats, that is, ways to hold the matrices of a model's layers: one file for each; `registry` lists them."""
