"""What tests of the bench share."""

from tests.netlab.conftest import needs_lab as needs_lab
