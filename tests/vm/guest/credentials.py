"""Keys and certificates, by files and by systemd's credentials, with the drop-ins of operations.md."""

from __future__ import annotations

import os
import re
import ssl
import stat
from pathlib import Path

from tests.vm import documents
from tests.vm.guest import clients, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import UNIT, page, run, shell, show, systemctl

LETSENCRYPT = Path("/etc/letsencrypt/live/gpu1.example.org")
KEYS = Path("/etc/hearthd/keys.toml")


def make_keys(mode: int) -> str:
    """Writes the keys file of operations.md with a key that hearth hash-key has made. Returns the key."""
    shown = documents.block(page("operations.md"), "hearth hash-key --generate")
    told = run("hearth", "hash-key", "--generate").stdout
    key, digest = re.findall(r"(?:key|hash):\s+(\S+)", told)
    install = next(one for one in documents.commands(shown) if one.startswith("install"))
    KEYS.unlink(missing_ok=True)
    shell(install)
    text = documents.typed_after(shown, "sudoedit /etc/hearthd/keys.toml").replace('models = ["meta/*"]', 'models = ["fast"]')
    KEYS.write_text(text.replace('"sha256:…"', f'"{digest}"', 1).replace('"sha256:…"', f'"sha256:{"0" * 64}"', 1))
    KEYS.chmod(mode)
    return key


def _refuses_others(key: str) -> None:
    expect(clients.chat()[0] == 401, "a chat without a key")
    status, body = clients.chat(headers={"Authorization": f"Bearer {key}"})
    expect(status == 200, (status, body))


@check("the keys file of operations.md, readable for the group: it opens for its key only", restarts=True)
def keys_file() -> str:
    key = make_keys(0o640)
    service.write_settings('keys_file = "/etc/hearthd/keys.toml"\n')
    systemctl("restart", UNIT)
    service.wait_active()
    _refuses_others(key)
    return run("stat", "-c", "%A %U:%G", str(KEYS)).stdout.strip()


@check("the keys as a credential, by the drop-in of operations.md and with mode 0600; no other user can read it", restarts=True)
def keys_credential() -> str:
    key = make_keys(0o600)
    run("chown", "root:root", str(KEYS))
    told = documents.spans(page("operations.md"), "**Keys as a credential**")
    drop_in = next(one for one in told if one.startswith("LoadCredential="))
    service.write_drop_in(f"[Service]\n{drop_in}\n")
    service.write_settings(next(one for one in told if one.startswith("keys_file =")))
    systemctl("restart", UNIT)
    service.wait_active()
    _refuses_others(key)
    credential = f"/run/credentials/{UNIT}/keys"
    expect(run("cat", credential, user="bob", code=None).returncode != 0, "another user reads the credential")
    pid = str(service.main_pid())
    expect(
        run("nsenter", "-t", pid, "-m", "setpriv", "--reuid=hearthd", "--clear-groups", "cat", credential).stdout, "hearthd itself"
    )
    KEYS.write_text("[tenants.nobody]\nkeys = []\n")
    systemctl("reload", UNIT)
    _refuses_others(key)  # "a changed file needs a restart"
    return drop_in


def _certificates() -> ssl.SSLContext:
    """A CA, and what certbot would have put where the docs' example has it."""
    LETSENCRYPT.mkdir(parents=True, exist_ok=True)
    os.chmod("/etc/letsencrypt", 0o700)
    shell(
        "cd /etc/letsencrypt && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -keyout ca.key"
        " -out ca.pem -subj /CN=ca -addext keyUsage=keyCertSign 2>/dev/null"
        " && openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout live/gpu1.example.org/privkey.pem"
        " -out request.pem -subj /CN=gpu1.example.org 2>/dev/null"
        " && printf 'subjectAltName=DNS:gpu1.example.org,IP:127.0.0.1\\n' > names"
        " && openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 20 -extfile names"
        " -out live/gpu1.example.org/fullchain.pem 2>/dev/null && cat ca.pem >> live/gpu1.example.org/fullchain.pem"
    )
    LETSENCRYPT.joinpath("privkey.pem").chmod(0o600)
    return ssl.create_default_context(cafile="/etc/letsencrypt/ca.pem")


@check("TLS by the credentials of operations.md: files that only root can read, certificate checked by the client", restarts=True)
def tls_credentials() -> str:
    trusted = _certificates()
    text = page("operations.md")
    told = documents.spans(text, "or systemd reads them as root")
    service.write_drop_in(documents.block(text, "LoadCredential=fullchain"))
    service.write_settings("".join(f"{one}\n" for one in told if one.startswith("tls_")))
    systemctl("restart", UNIT)
    service.wait_active()
    status, body = clients.chat(trusted=trusted)
    expect(status == 200, (status, body))
    tls = service.ask("status")["tls"]
    return f"{', '.join(one for one in told if one.startswith('tls_'))}; {tls}"


@check("TLS by files that the renewal hook of operations.md hands over; a renewal is taken without a restart", restarts=True)
def tls_hook() -> str:
    trusted = _certificates()
    text = page("operations.md")
    hook = Path("/usr/local/sbin/renewal-hook")
    hook.write_text(documents.block(text, "RENEWED_LINEAGE"))
    hook.chmod(0o755)
    shell(f"RENEWED_LINEAGE={LETSENCRYPT} {hook}")
    settings = documents.block(text, 'tls_certificate = "/etc/hearthd/tls/fullchain.pem"')
    service.write_settings(settings)
    systemctl("restart", UNIT)
    service.wait_active()
    expect(clients.chat(trusted=trusted)[0] == 200, "no chat over TLS")
    expect(stat.S_IMODE(Path("/etc/hearthd/tls/privkey.pem").stat().st_mode) == 0o640, "the key's mode")
    pid = service.main_pid()
    trusted = _certificates()  # of another CA, so that only the new pair is trusted
    shell(f"RENEWED_LINEAGE={LETSENCRYPT} {hook}")
    service.wait_for("the new certificate", lambda: clients.chat(trusted=trusted)[0] == 200)
    expect(service.main_pid() == pid and show("NRestarts") == "0", "it was restarted")
    return ""
