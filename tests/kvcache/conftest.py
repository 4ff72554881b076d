import pytest
from tests.kvcache.redis_server import start_redis


@pytest.fixture
def redis_server():
    server = start_redis()
    yield server
    server.close()
