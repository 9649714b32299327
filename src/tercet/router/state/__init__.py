"""The state that all processes of a router share: its stores, its followers, members, roles and adapters."""
