"""Models, their exported files and pictures, which the tests of the server use too."""

from tests.serving.conftest import bundle as bundle
from tests.serving.conftest import exported as exported
from tests.serving.conftest import samples as samples
