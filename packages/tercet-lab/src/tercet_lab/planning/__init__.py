"""The planner's simulator, the planner of simulated runs, and the planner of a live router."""
