"""The engine: knows steps, branches, sites and hooks; knows no strategy and no model family."""
