"""Pure decisions: which engine, what a route costs, what to move. No I/O, no sockets, no tensors."""
