"""One forward pass: its inputs, its program or graph, and the forms it takes."""
