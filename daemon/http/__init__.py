"""Serves HTTP/1.1 connections: listens on sockets, limits the connections, and passes on requests and responses."""
