"""Pure decisions: which engine serves a request, the cost of a route, and which sequences move. No I/O, no tensors."""
