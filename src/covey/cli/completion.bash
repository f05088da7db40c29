_covey() {
    local word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} words= i=$((COMP_CWORD - 1)) flag=
    if [ "$COMP_CWORD" = 1 ]; then
        words="@verbs@"
    elif [ "${word#-}" = "$word" ]; then
        [ "$word" = "=" ] && word=
        [ "${COMP_WORDS[i]}" = "=" ] && i=$((i - 1))
        while [ "$i" -gt 1 ] && [ "${COMP_WORDS[i]#-}" = "${COMP_WORDS[i]}" ]; do i=$((i - 1)); done
        [ "$i" -gt 1 ] && flag=${COMP_WORDS[i]}
        case "$verb $flag" in
@values@
        esac
        if [ "$COMP_CWORD" = 2 ]; then
            case "$verb" in
@below@
            esac
        fi
        [ -n "$words" ] || return
    else
        case "$verb" in
@cases@
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _covey covey
