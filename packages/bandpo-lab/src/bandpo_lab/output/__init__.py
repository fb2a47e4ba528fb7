"""Print text safely, and write tables, figures and pages, in one style.

No figure is computed here, and no command is read: see the folder of each subject, and `bandpo_lab.cli`.
"""
