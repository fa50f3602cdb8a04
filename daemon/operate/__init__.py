"""What operators ask and see: the control API and its views."""
