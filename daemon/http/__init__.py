"""HTTP/1.1 connections: sockets, limits on connections, requests and responses."""
