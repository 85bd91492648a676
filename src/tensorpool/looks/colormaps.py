# SPDX-License-Identifier: Apache-2.0
"""Colour maps: a shade from 0 to 255 as a colour.

viridis, magma and cividis are those of Smith, van der Walt and others (CC0), turbo is that of Mikhailov (Apache-2.0),
each by every fifth of its colours, between which we interpolate. The first three grow evenly in lightness and are
readable for colour-blind people; turbo shows more detail and is not.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from tensorpool.shm.arrays import Array

_COLOURS: Final = {
    "viridis": (
        "44015446085c471063481769481d6f482475472a7a46307e453781433d844142873f48893d4e8a3a538b38598c355e8d33638d31"
        "688e2e6d8e2c718e2a768e297b8e27808e25848e23898e218e8d20928c1f978b1e9c891fa18821a58524aa8328ae802eb37c35b7"
        "793dbc7446c06f50c46a5ac86465cb5e70cf577cd25089d54895d840a2da37b0dd2fbddf26cae11fd8e219e5e419f1e51dfde725"
    ),
    "magma": (
        "00000402020b0504160907200e0b2b140e361a104221114e29115a311165390f6e420f754a107952137c5a167e6219806a1c8172"
        "1f81792282812581892881912b81992d80a1307eaa337db2357bba3878c23b75ca3e72d2426fd9466be04c67e75263ec5860f160"
        "5df4695cf7725cf97b5dfb8560fc8e64fd9869fea16efeaa74feb47bfebd82fec68afecf92fed89afde2a3fdebacfcf4b6fcfdbf"
    ),
    "cividis": (
        "00224e002656002a5f002d68003070083370163770203a6f273e6e2e416d34456c3a486c3f4c6c444f6c49536c4e566c535a6d57"
        "5d6d5c616e60646f656870696b716d6f727272747676767a7a787e7d788381798885788d8878928c789690779b9476a09875a59c"
        "74aaa073afa471b5a86fbaac6dbfb06bc4b468c9b965cfbd62d4c15fdac65bdfca57e5cf52ead34cf0d846f6dd3ffce236fee838"
    ),
    "turbo": (
        "30123b36215f3b2f803f3e9c424bb54559cb4666dd4773eb4680f6458cfd4099ff38a5fb2fb2f427bee91fc9dd1ad4d018ddc21a"
        "e4b622ebaa2ff19b3ff68a52fa7a65fd6979fe598bff4b9cfe40a9fb39b7f735c3f134d0ea34dbe236e5d938eecf3af5c53afaba"
        "39fdae35fea130fe932afc8423f9751df46617ef5811e84b0ce14109d83706ce2d04c32503b71d02a916019b0f018b09027a0403"
    ),
}
NAMES: Final = ("gray", *_COLOURS)


@functools.cache
def table(name: str) -> Array:
    """The 256 colours of a map, as (256, 3) uint8."""
    if name == "gray":
        return np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
    known = np.frombuffer(bytes.fromhex(_COLOURS[name]), np.uint8).reshape(-1, 3)
    every, fifth = np.arange(256), np.arange(0, 256, 5)
    return np.stack([np.rint(np.interp(every, fifth, known[:, at])).astype(np.uint8) for at in range(3)], axis=1)


def apply(shades: Array, name: str) -> Array:
    """A picture of shades in the colours of a map; gray stays as it is."""
    return shades if name == "gray" else np.take(table(name), shades, axis=0)
