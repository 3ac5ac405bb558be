"""Reporting: records of results, the runs that may be compared, plots, tables and pages."""
