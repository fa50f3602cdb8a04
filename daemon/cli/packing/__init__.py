"""`hearth pack` and `hearth verify`: write a model's weights losslessly in fewer bytes, and prove that they are the same."""
