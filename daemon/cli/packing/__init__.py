"""Implements `hearth pack`, which stores a model's weights losslessly in fewer bytes, and `hearth verify`, which checks that these
are the same weights."""
