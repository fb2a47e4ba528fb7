"""What the clip does to a run: the audit, the log and its summary, warnings, figures and pages."""
