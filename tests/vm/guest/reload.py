"""systemctl reload: what is right applies, what is wrong is told and changes nothing."""

from __future__ import annotations

from tests.vm import documents
from tests.vm.guest import clients, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import UNIT, hearth, journal_end, run, show, systemctl


def _setting(key: str) -> str:
    rows = service.ask("config")
    return str(next(row["value"] for row in rows if row["key"] == key))


@check("systemctl reload applies a changed file, of conf.d too, in the same process")
def right() -> str:
    pid = service.main_pid()
    cursor = journal_end()
    service.write_settings("drain_timeout_s = 17\n")
    systemctl("reload", UNIT)
    expect(_setting("drain_timeout_s") in ("17", "17.0"), _setting("drain_timeout_s"))
    expect(service.main_pid() == pid and show("ActiveState") == "active", show("ActiveState"))
    told = service.told_since(cursor)
    expect("drain_timeout_s" in told, told)
    return next(line for line in told.splitlines() if "reloaded" in line)


@check("a file with an error: hearth reload prints the line of operations.md, systemctl reload fails, old settings stay")
def wrong() -> str:
    shown = documents.block(service.page("operations.md"), "The running settings stay")
    promised = documents.typed_after(shown, "hearth reload").strip()
    pid = service.main_pid()
    cursor = journal_end()
    service.write_settings("max_wait_s = 'soon'\n")
    systemctl("reload", UNIT, code=1)
    expect(service.main_pid() == pid and show("ActiveState") == "active", show("ActiveState"))
    expect(show("StatusText").startswith("serves http"), f"StatusText={show('StatusText')}")
    expect(clients.chat()[0] == 200, "no chat after a refused reload")
    expect(service.ask("status")["reload_refused"], "hearth status does not tell it")
    promised = promised.replace("/etc/hearthd/node.toml:12", "/etc/hearthd/conf.d/90-check.toml:1")
    expect(promised.removeprefix("hearth: ") in service.told_since(cursor), service.told_since(cursor)[-700:])
    said = run("hearth", "reload", code=None).stderr.strip()
    expect(said == promised, f"hearth reload says {said!r}, not {promised!r}")
    (service.SETTINGS / "90-check.toml").unlink()
    systemctl("reload", UNIT)
    expect(not service.ask("status")["reload_refused"], "it is still refused")
    return said


@check("SIGHUP as logrotate sends it (audit.md) reloads; the audit log is opened anew in a folder of LogsDirectory=", restarts=True)
def rotation() -> str:
    page = service.page("reference/audit.md")
    spans = documents.spans(page, "For a folder in `/var/log`")
    service.write_drop_in(f"[Service]\n{next(one for one in spans if one.startswith('LogsDirectory='))}\n")
    service.write_settings(documents.block(page, 'audit_log = "/var/log/hearthd/audit.log"'))
    systemctl("restart", UNIT)
    service.wait_active()
    hearth("load", "fast")
    log = service.Path("/var/log/hearthd/audit.log")
    service.wait_for("the act in the audit log", lambda: '"load"' in log.read_text())
    old = log.rename(log.with_suffix(".log.1"))
    service.shell(documents.block(page, "postrotate").partition("postrotate\n")[2].partition("endscript")[0])
    service.wait_for("a new audit log", log.exists)
    hearth("unload", "fast")
    service.wait_for("the act in the new log", lambda: '"unload"' in log.read_text())
    expect('"unload"' not in old.read_text(), "it went into the old one")
    return run("stat", "-c", "%A %U", str(log)).stdout.strip()
