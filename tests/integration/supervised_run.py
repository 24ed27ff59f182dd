"""A Supervisor over the services of a JSON file: `python -m tests.integration.supervised_run HOME TABLE`."""

import asyncio
import json
import pathlib
import sys

from deploy.local.config import make_folders, paths_of
from deploy.local.services_table import Probe, Service
from deploy.local.supervision import Rules
from deploy.local.supervisor import Supervisor


def main():
    home, table = sys.argv[1:3]
    paths = paths_of(home)
    make_folders(paths)
    data = json.loads(pathlib.Path(table).read_text())
    services = [
        Service(
            name=row["name"],
            row=row["name"],
            module=row.get("module", ""),
            command=tuple(row["command"]),
            depends_on=tuple(row.get("depends_on", ())),
            probe=Probe(row.get("probe", "http"), port=row.get("port", 0), path=row.get("path", "/ready")),
            launcher=row.get("launcher", "exec"),
            env=row.get("env", {}),
            stop_grace_ms=row.get("stop_grace_ms", 1000),
            drain_ms=row.get("drain_ms", 0),
            served_by=tuple(row.get("served_by", ())),
        )
        for row in data["services"]
    ]
    supervisor = Supervisor(services, paths, rules=Rules(**data.get("rules", {})), health_probe_s=0.2)
    sys.exit(asyncio.run(supervisor.run()))


if __name__ == "__main__":
    main()
