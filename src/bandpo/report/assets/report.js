/* The report of `bandpo report`: its sections in their order. */
"use strict";

main.replaceChildren();
diagnosis();
curves();
rules();
words();
wordsApart();
main.append(withoutTokens(), element("p", { class: "soft" }, `Made by bandpo ${data.version}. This file loads nothing from elsewhere.`));
