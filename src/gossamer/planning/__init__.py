"""Planning: measures the ranks and their links, predicts every method, and chooses one."""

from gossamer.planning.plan import Plan, read_plan

__all__ = ["Plan", "read_plan"]
