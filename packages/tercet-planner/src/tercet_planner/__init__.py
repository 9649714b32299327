"""The planner: it simulates other fleets, and advises or changes a live one, or a simulated one in virtual time."""
