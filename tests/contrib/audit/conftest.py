from audited_project import audited, copied

__all__ = ["audited", "copied"]
