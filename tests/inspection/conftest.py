"""The composer of the composition tests."""

from tests.composition.conftest import composer

__all__ = ["composer"]
