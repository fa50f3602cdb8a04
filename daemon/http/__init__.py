"""Connections: sockets, who is let in when they are many, HTTP/1.1 on them, responses."""
