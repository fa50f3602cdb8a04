"""Who may use the API: keys, hosts, other sites' pages."""
