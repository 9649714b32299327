"""The planner's simulator, and planners in virtual time and of a live router."""
