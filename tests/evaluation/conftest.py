from report_workspace import params, workspace

__all__ = ["params", "workspace"]
