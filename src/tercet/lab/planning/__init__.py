"""The planner's simulator, and planners in virtual time and beside a live router."""
