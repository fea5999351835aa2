"""What tests of the bench share."""

from tests.lab.conftest import needs_lab as needs_lab
