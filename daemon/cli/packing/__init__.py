"""`hearth pack` and `hearth verify`: a model's weights losslessly in fewer bytes, and the proof of it."""
