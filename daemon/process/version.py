"""hearthd's version, which the programs `hearthd` and `hearth` report."""

VERSION = "0.1.0"
