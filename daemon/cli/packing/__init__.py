"""`hearth pack` and `hearth verify`: store a model's weights losslessly in fewer bytes, and verify that they are the same."""
