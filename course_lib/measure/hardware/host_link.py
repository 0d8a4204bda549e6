"""The links between a GPU and the memory of its host."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class HostLink:
    """One kind of link.

    Attributes:
      name: as `host_link` takes it.
      title: for pictures and tables.
      bandwidth: bytes/s in one direction; both directions run at the same time.
      source: of the figure.
    """

    name: str
    title: str
    bandwidth: float
    source: str


HOST_LINKS = {
    link.name: link
    for link in (
        HostLink(
            "pcie4",
            "PCIe 4.0 x16",
            32e9,  # "64 GB/s", both directions
            "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf",
        ),
        HostLink(
            "pcie5",
            "PCIe 5.0 x16",
            64e9,  # "128 GB/s", both directions
            "https://www.nvidia.com/en-us/data-center/h100/",
        ),
        HostLink(
            "nvlink-c2c",
            "NVLink-C2C of a Grace Hopper",
            450e9,  # "900 GB/s", both directions
            "https://developer.nvidia.com/blog/nvidia-grace-hopper-superchip-architecture-in-depth/",
        ),
    )
}
"""The links by name. These are the rates of the wires; copies reach 80 to 90% of them."""


def host_link(name: str) -> HostLink:
    """Returns a link between a GPU and its host.

    Raises:
      ValueError: if the table has no such name.
    """
    if name not in HOST_LINKS:
        raise ValueError(f"name={name!r} must be a link of the table: {', '.join(HOST_LINKS)}")
    return HOST_LINKS[name]
