#!/bin/sh
# Installs hearthd as a service from this checkout, or takes it away again: install.sh install|uninstall. Run it through make:
#   sudo make install      sudo make uninstall
# Variables, all optional: PYTHON, PREFIX (versions and the `current` link), DESTDIR (packagers: everything goes below it, nothing
# is started or created on this machine), VERSION, EXTRAS (cpu,cuda), VENV_ARGS, PIP_ARGS.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
prefix=${PREFIX:-/opt/hearthd}
destdir=${DESTDIR:-}
version=${VERSION:-$(sed -n 's/^VERSION = "\(.*\)"/\1/p' daemon/process/version.py)}
local=$destdir/usr/local
say() { echo "install: $*"; }
die() { echo "install: $*" >&2; exit 1; }

# what both directions know about, beside $prefix
files="
$local/lib/systemd/system/hearthd.service
$local/lib/systemd/system/hearthd.socket
$local/lib/sysusers.d/hearthd.conf
$local/lib/tmpfiles.d/hearthd.conf
$local/share/man/man8/hearthd.8
$local/share/man/man1/hearth.1
$local/share/bash-completion/completions/hearth
$local/share/zsh/site-functions/_hearth
$local/share/fish/vendor_completions.d/hearth.fish
$local/bin/hearthd
$local/bin/hearth
"

put() { install -D -m 0644 "$1" "$2"; }
put_completion() {
    mkdir -p "$(dirname "$2")"
    "$destdir$prefix/$version/bin/python" -P -m daemon.cli completion "$1" >"$2"
}

# The new version is complete before the link points to it, and the link moves in one step: a crash leaves the old one in use.
make_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is older than Python 3.11; name another one: PYTHON=python3.11"
    final=$prefix/$version
    new=$destdir$prefix/.$version.new
    rm -rf "$new"
    mkdir -p "$destdir$prefix"
    say "$final: a virtual environment with torch and what hearthd needs"
    # shellcheck disable=SC2086  # several words
    "$python" -m venv ${VENV_ARGS:-} "$new"
    # built from a copy: as root it would leave files in the checkout that its owner cannot remove
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    cp -R pyproject.toml README.md LICENSE config daemon engine hearthd loader scheduler "$source"
    mkdir "$source/docs"
    cp -R docs/man "$source/docs"
    find "$source" -name __pycache__ -prune -exec rm -rf {} +
    # shellcheck disable=SC2086
    "$new/bin/python" -m pip install -q --disable-pip-version-check --no-warn-script-location -c constraints.txt ${PIP_ARGS:-} \
        "$source[${EXTRAS:-cpu}]"
    # scripts name the folder they were made in
    grep -lIF "$new" "$new"/bin/* | xargs -r sed -i "s|$new|$final|g"
    if [ -e "$destdir$final" ]; then
        rm -rf "$destdir$prefix/.$version.old"
        mv "$destdir$final" "$destdir$prefix/.$version.old"
    fi
    mv "$new" "$destdir$final"
    rm -rf "$destdir$prefix/.$version.old"
    ln -sfn "$version" "$destdir$prefix/.current.new"
    mv -T "$destdir$prefix/.current.new" "$destdir$prefix/current"
}

put_files() {
    for unit in hearthd.service hearthd.socket; do
        put systemd/$unit "$local/lib/systemd/system/$unit"
        sed -i "s|/opt/hearthd|$prefix|g" "$local/lib/systemd/system/$unit"
    done
    put systemd/hearthd.sysusers "$local/lib/sysusers.d/hearthd.conf"
    put systemd/hearthd.tmpfiles "$local/lib/tmpfiles.d/hearthd.conf"
    put docs/man/hearthd.8 "$local/share/man/man8/hearthd.8"
    put docs/man/hearth.1 "$local/share/man/man1/hearth.1"
    put_completion bash "$local/share/bash-completion/completions/hearth"
    put_completion zsh "$local/share/zsh/site-functions/_hearth"
    put_completion fish "$local/share/fish/vendor_completions.d/hearth.fish"
    mkdir -p "$local/bin"
    ln -sfn "$prefix/current/bin/hearthd" "$local/bin/hearthd"
    ln -sfn "$prefix/current/bin/hearth" "$local/bin/hearth"
    config=$destdir/etc/hearthd/node.toml
    if [ -e "$config" ]; then
        say "$config is there and stays as it is; every key with its default: config/example.toml"
    else
        put config/example.toml "$config"
        sed -i 's/^\[models/# [models/' "$config"  # an example, not a model of this node
    fi
}

# So that the first answers are as fast as all others. As the service's user, whose folder it is.
compile_kernels() {
    say "/var/cache/hearthd: compiling the CPU kernels for this machine, about a minute on two cores"
    runuser -u hearthd -- "$prefix/current/bin/python" -P -m engine.warm /var/cache/hearthd ||
        say "the kernels are not all compiled; hearthd does it when it starts, and is slower until then"
}

case ${1:-} in
install)
    [ -n "$destdir" ] || [ "$(id -u)" = 0 ] || die "needs root: sudo make install"
    make_venv
    put_files
    [ -z "$destdir" ] || { say "done, below $destdir"; exit 0; }
    command -v systemd-sysusers >/dev/null || die "the files are in place, but there is no systemd here to run them"
    systemd-sysusers "$local/lib/sysusers.d/hearthd.conf"
    systemd-tmpfiles --create "$local/lib/tmpfiles.d/hearthd.conf"
    compile_kernels
    [ -d /run/systemd/system ] || { say "systemd does not run here: nothing was enabled"; exit 0; }
    systemctl daemon-reload
    if systemctl -q is-active hearthd.service; then
        say "hearthd runs the version it was started with until: systemctl restart hearthd"
        say "back to an older one: ln -sfn VERSION $prefix/current && systemctl restart hearthd; installed: $(ls "$prefix" | grep -v current | tr '\n' ' ')"
    else
        say "settings: /etc/hearthd/node.toml; models: /var/lib/hearthd/models; start: systemctl enable --now hearthd.socket hearthd.service"
    fi
    ;;
uninstall)
    [ -n "$destdir" ] || [ "$(id -u)" = 0 ] || die "needs root: sudo make uninstall"
    if [ -z "$destdir" ] && [ -d /run/systemd/system ]; then
        systemctl disable --now hearthd.socket hearthd.service 2>/dev/null || true
    fi
    for file in $files; do rm -f "$file"; done
    # only what looks like ours: the link, and folders that hold a virtual environment
    for folder in "$destdir$prefix"/* "$destdir$prefix"/.*.new; do
        if [ -e "$folder/pyvenv.cfg" ] && [ ! -L "$folder" ]; then rm -rf "$folder"; fi
    done
    rm -f "$destdir$prefix/current"
    rmdir "$destdir$prefix" 2>/dev/null || true
    rm -rf "$destdir/var/cache/hearthd"
    if [ -z "$destdir" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
    say "kept: $destdir/etc/hearthd, $destdir/var/lib/hearthd with its models, and the user hearthd"
    ;;
*)
    die "usage: install.sh install|uninstall"
    ;;
esac
