"""Modules that make frameworks call these ops without a change of their models; docs/integrations.md shows each.

A module of this package imports its framework when it is used, and says so if it does not know the installed version.
"""
