from tests.server.conftest import roomy_folder

__all__ = ["roomy_folder"]
