import pytest
from browser_helpers import open_browser


@pytest.fixture
def browser():
    driver = open_browser()
    yield driver
    driver.quit()
