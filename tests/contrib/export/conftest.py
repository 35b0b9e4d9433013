from page_project import here, page_project, params, photo, toy

__all__ = ["here", "page_project", "params", "photo", "toy"]
