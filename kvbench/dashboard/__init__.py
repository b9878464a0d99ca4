"""The dashboard: every run below `runs_dir` on one static page that needs neither server nor network."""
