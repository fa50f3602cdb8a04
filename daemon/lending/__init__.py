"""`hearth lend`: runs engines for a daemon on another host, which leads the models that they have shares of."""
