#!/usr/bin/env bash
# Checks denormd's rules in a workflow, and reports on the pull request. action.yaml says what the variables mean.
#
# Exit status: 0 all is well or was said in the report, 1 the config is wrong, a case failed, or the cluster cannot be asked.
set -euo pipefail
shopt -s globstar nullglob inherit_errexit

config=${INPUT_CONFIG:-denormd.yaml}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
report=$work/report.md
failed=

# Lines of code in Markdown: nothing in them can end the block.
indented() { printf '\n'; sed 's/^/    /'; printf '\n'; }

# The program: the one that is given, a release, or the one on PATH.
program() {
    if [ "${INPUT_DENORMD:-}" ]; then
        command -v "$INPUT_DENORMD" || { echo "::error::there is no program $INPUT_DENORMD" >&2; exit 1; }
    elif [ "${INPUT_VERSION:-}" ]; then
        case $(uname -m) in aarch64 | arm64) arch=aarch64 ;; *) arch=x86_64 ;; esac
        name=denormd-$INPUT_VERSION-$arch-unknown-linux-musl
        from=${GITHUB_SERVER_URL:-https://github.com}/$INPUT_REPOSITORY/releases/download/v$INPUT_VERSION
        for file in "$name.tar.gz" SHA256SUMS; do
            curl --fail --silent --show-error --location --retry 3 --output "$work/$file" "$from/$file"
        done
        (cd "$work" && sha256sum --check --ignore-missing --quiet SHA256SUMS) >&2
        tar -C "$work" -xzf "$work/$name.tar.gz" denormd
        echo "$work/denormd"
    else
        command -v denormd || { echo "::error::denormd is not on PATH: give the input denormd or version" >&2; exit 1; }
    fi
}

# The config of the base of the pull request, as arguments of `diff`; `-` if there was none.
base_config() {
    local path found=()
    git cat-file -e "$BASE^{commit}" 2>/dev/null || git fetch --quiet --depth=1 origin "$BASE" || return 1
    mkdir "$work/base"
    for path in ${config//,/ }; do
        path=${path%/}
        if git cat-file -e "$BASE:./$path" 2>/dev/null; then
            git archive "$BASE" -- "$path" | tar -x -C "$work/base"
            found+=("$work/base/$path")
        fi
    done
    (IFS=,; echo "${found[*]:--}")
}

checked() { # checked TITLE OK|FAILED OUTPUT
    printf '\n**%s**: %s\n' "$1" "$2"
    if [ -s "$3" ]; then indented <"$3"; fi
}

denormd=$(program)
# What is checked here needs no cluster, but a config needs a connection string, which often comes with the deployment.
if ! "$denormd" config --config "$config" >/dev/null 2>&1; then
    export DENORMD__MONGODB__URI=${INPUT_URI:-mongodb://not-asked.invalid/}
fi

changes=yes
if [ "${BASE:-}" ]; then
    if ! old=$(base_config); then
        echo "::error::the base of the pull request is not there: check it out with \`fetch-depth: 0\`"
        exit 1
    elif "$denormd" diff "$old" "$config" --markdown </dev/null >"$work/diff" 2>"$work/error"; then
        if [ "$("$denormd" diff "$old" "$config" --output json </dev/null | grep -c '^  "changed": false')" = 1 ]; then changes=; fi
        cat "$work/diff"
    else
        printf '### denormd: the change cannot be described\n'
        indented <"$work/error"
    fi >>"$report"
else
    printf '### denormd\n' >>"$report"
fi

if "$denormd" plan --offline --config "$config" >"$work/plan" 2>&1; then
    # Warnings, and the verdict.
    sed -n '/^warning:/,$p' "$work/plan" >"$work/said"
    checked 'denormd plan --offline' "$(tail -n 1 "$work/plan")" "$work/said" >>"$report"
else
    failed=yes
    checked 'denormd plan --offline' failed "$work/plan" >>"$report"
fi

# Patterns, and so without quotes.
# shellcheck disable=SC2206
tests=(${INPUT_TESTS:-})
if [ ${#tests[@]} -gt 0 ]; then
    if "$denormd" test --config "$config" "${tests[@]}" >"$work/test" 2>&1; then
        checked 'denormd test' "$(tail -n 1 "$work/test")" /dev/null >>"$report"
    else
        failed=yes
        checked 'denormd test' failed "$work/test" >>"$report"
    fi
elif [ "${INPUT_TESTS:-}" ]; then
    failed=yes
    checked 'denormd test' "failed: no file fits the patterns of the input tests" /dev/null >>"$report"
fi

if [ "${INPUT_URI:-}" ] && [ ! "$failed" ]; then
    status=0
    DENORMD__MONGODB__URI=$INPUT_URI "$denormd" plan --config "$config" >"$work/plan" 2>"$work/error" || status=$?
    case $status in
    # 4: something is to be done first, or a rule would be blocked. That is for people to read, and does not fail the check.
    0 | 4)
        # The fan-out of each rule, and all from the effect on existing data on. Not the examples: they name documents.
        awk '/^[^ ].*: .* -> / { rule = $0 }
             /^  fan-out/ { print rule; print; getline; print }
             /^$/ { rest = 1 }
             rest' "$work/plan" >"$work/said"
        checked 'denormd plan, on the cluster' "$(tail -n 1 "$work/error" | grep . || tail -n 1 "$work/plan")" "$work/said" >>"$report"
        ;;
    *)
        failed=yes
        checked 'denormd plan, on the cluster' failed "$work/error" >>"$report"
        ;;
    esac
fi

cat "$report" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"

# A comment of its own for each config, written once and then kept up to date.
comment() {
    export MARKER="<!-- denormd check-rules $config -->"
    local comments=repos/$GITHUB_REPOSITORY/issues/$PULL_REQUEST/comments id
    # A comment may have 65,536 characters.
    { echo "$MARKER"; LC_ALL=C awk '{ n += length + 1 } n > 60000 { print "\n(The summary of the run has the rest.)"; exit } 1' "$report"; } >"$work/body"
    id=$(gh api --paginate "$comments" --jq '.[] | select(.body | startswith(env.MARKER)) | .id' | sed -n 1p) || return 1
    if [ "$id" ]; then
        gh api --silent --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$id" --field "body=@$work/body"
    elif [ "$changes" ] || [ "$failed" ]; then
        gh api --silent --method POST "$comments" --field "body=@$work/body"
    fi
}
if [ "${INPUT_COMMENT:-true}" = true ] && [ "${PULL_REQUEST:-}" ]; then
    comment || echo "::warning::the pull request cannot be commented on; the report is in the summary of this run"
fi

if [ "$failed" ]; then
    echo "::error::denormd's rules in $config are not in order: the summary of this run says why"
    exit 1
fi
