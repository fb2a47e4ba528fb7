/* The sections of the report in their order. */
"use strict";

main.replaceChildren();
diagnosis();
curves();
opening();
rules();
words();
disagreeingWords();
main.append(missingTokens(), element("p", { class: "soft" }, `Made by rlvet ${data.version}. This file loads nothing from elsewhere.`));
