"""Both ends of the connections between routers, engines and pickers: clients, token streams, parts of ASGI servers."""
