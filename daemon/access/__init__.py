"""Decides who may use the API: keys, limits, hosts, and pages of other sites."""
