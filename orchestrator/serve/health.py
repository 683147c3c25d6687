"""Whether the pipeline behind a server serves."""

from orchestrator.stages import Cluster
from pptasks.errors import PPError


class Health:
    """Written by the thread that watches the cluster, read by those that serve. `reason`: why not; "": it serves."""

    def __init__(self) -> None:
        self.reason = ""
        self.is_over = False  # a part has ended, not merely fallen silent: what is under way will not come

    def look(self, cluster: Cluster) -> None:
        """Asks the broker; a second or so, if that is away."""
        reason, is_over = "", False
        try:
            cluster.check()
        except PPError as e:
            reason, is_over = str(e), True
        else:
            reason = _not_ready(cluster)
        self.reason, self.is_over = reason, is_over


def _not_ready(cluster: Cluster) -> str:
    try:
        cluster.stages.refresh()
        return "" if cluster.stages.are_ready() else cluster.stages.late()
    except PPError as e:
        return str(e)
