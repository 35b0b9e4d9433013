from label_project import start
from page_project import here, page_project, params

__all__ = ["here", "page_project", "params", "start"]
