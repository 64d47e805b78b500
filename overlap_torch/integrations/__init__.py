"""Modules that make frameworks call these ops without changes of models; docs/integrations.md shows each.

Each module imports its framework when it is used, and raises an error if it does not know the installed version.
"""
