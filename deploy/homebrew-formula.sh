#!/usr/bin/env bash
# Prints the Homebrew formula of a release, from the archives in a folder: denormd-VERSION-TARGET.tar.gz.
#   deploy/homebrew-formula.sh FOLDER >denormd.rb
# It belongs into a repository named homebrew-denormd of the same owner: `brew install OWNER/denormd/denormd`.
set -euo pipefail
folder=$(realpath "$1")
cd "$(dirname "$0")/.."
value() { sed -n "s/^$1 = \"\(.*\)\"/\1/p" Cargo.toml | head -1; }
version=$(value version) repository=$(value repository)

archive() {
    local name=denormd-$version-$1.tar.gz
    printf 'url "%s/releases/download/v%s/%s"\n' "$repository" "$version" "$name"
    printf '      sha256 "%s"\n' "$(sha256sum "$folder/$name" | cut -d' ' -f1)"
}

cat <<FORMULA
class Denormd < Formula
  desc "Keeps the fields you copy between MongoDB collections equal to their source"
  homepage "$repository"
  version "$version"
  license "$(value license)"

  on_macos do
    on_arm do
      $(archive aarch64-apple-darwin)
    end
    on_intel do
      $(archive x86_64-apple-darwin)
    end
  end

  on_linux do
    on_arm do
      $(archive aarch64-unknown-linux-musl)
    end
    on_intel do
      $(archive x86_64-unknown-linux-musl)
    end
  end

  def install
    bin.install "denormd"
    man1.mkpath
    system bin/"denormd", "man", "--out", man1
    generate_completions_from_executable(bin/"denormd", "completions")
  end

  test do
    (testpath/"rules.yaml").write <<~YAML
      mongodb: { uri: "mongodb://localhost/?replicaSet=rs0", database: shop }
      rules:
        - name: customer-name
          copy: { source: customers, target: orders, match: { customer: _id }, set: { customer_name: \$name } }
    YAML
    system bin/"denormd", "plan", "--offline", "--config", testpath/"rules.yaml"
  end
end
FORMULA
