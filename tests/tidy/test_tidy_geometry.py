"""docs/page-geometry.md is what shared/vmm/geometry.py says now."""

from shared.vmm import geometry_table


def test_the_page_geometry_document_is_current():
    """`python -m shared.vmm.geometry_table` writes it."""
    assert geometry_table.PATH.read_text() == geometry_table.render()
